"""Records what other libraries keep: the files in tests/golden. No module here imports kvjax."""
