"""A plugin outside core that uses each seam of the layers once; tests/contract/test_seams*.py."""
