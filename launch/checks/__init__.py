"""Before a rank starts: facts that a host finds out about itself, and what is wrong with them."""
