"""graphc/runtime"""
