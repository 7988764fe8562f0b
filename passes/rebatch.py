"""rebatch"""
