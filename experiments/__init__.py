"""Command-line experiments on top of kvjax and its models."""
