"""What released code and other libraries do otherwise than papers, by where it is from."""
