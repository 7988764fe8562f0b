"""train_mode"""
