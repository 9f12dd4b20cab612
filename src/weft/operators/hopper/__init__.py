"""Hopper's main loop for matrix products (sm_90): what the families of products share; no operators."""
