"""Measures what events cost the program that emits them."""
