"""convolution"""
