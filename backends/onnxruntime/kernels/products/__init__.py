"""Products of matrices, and what consists of them: attention, systems of equations, Fourier transforms."""
