"""Declarations of the ``graphc`` domain, by family; each module is named by an entry point of group ``graphc.ops``."""
