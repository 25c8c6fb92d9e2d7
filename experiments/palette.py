"""Colours, markers and line styles of every plot here."""

# Okabe and Ito's palette: told apart by all common kinds of colour vision. Markers differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*<>hp"
LINES = ("-", "--", ":")
