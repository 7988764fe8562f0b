"""cuBLASLt and cuDNN: what they are asked, and how an algorithm is chosen."""
