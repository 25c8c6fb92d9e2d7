"""Records what other libraries keep: the golden files beside this folder. No module here imports kvjax."""
