"""initialize"""
