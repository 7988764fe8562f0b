"""normalization"""
