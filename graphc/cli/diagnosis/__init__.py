"""What graphc doctor and graphc show flight find out."""
