"""Where served weights change sparsely, and where they don't: measured on a model of the user's
choice, figure by figure. `farcast study` runs it; it needs torch, and transformers for its models.
"""
