"""What is stored: slots with their positions, dense or in a pool, and the moment at which a policy meets them."""
