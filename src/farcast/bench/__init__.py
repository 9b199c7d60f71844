"""Benchmarks, compared in one run with what a user would pick instead."""
