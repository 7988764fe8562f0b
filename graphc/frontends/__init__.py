"""graphc/frontends"""
