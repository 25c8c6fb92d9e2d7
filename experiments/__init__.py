"""Command-line experiments on top of kvjax and its models."""

if __name__ == "kvjax.experiments":  # in the peers' environment it is `experiments`, without kvjax
    from kvjax.pallas_kernels.kinds import needs

    needs(__name__, "experiments", "filelock", "matplotlib", "pandas", "tyro")
