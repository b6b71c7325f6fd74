"""Tests of the C++ CPU kernels and of their installation into graphs."""
