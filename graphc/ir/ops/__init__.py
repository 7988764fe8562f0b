"""Declares the ops of the ``graphc`` domain, one module per family (entry points of group ``graphc.ops``)."""
