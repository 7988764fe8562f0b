"""bucket"""
