"""graphc/cli"""
