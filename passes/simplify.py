"""simplify"""
