"""legalize"""
