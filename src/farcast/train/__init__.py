"""The trainer: objectives, policy, checkpoints and the loop.

Importing this loads nothing; `farcast.train.loop`, `policy` and `models` need torch.
"""
