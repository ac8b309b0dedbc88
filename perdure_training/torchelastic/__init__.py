"""APIs of torchelastic that PyTorch no longer has, for scripts that use them."""
