"""What is broken on purpose, and the script that asks whether tests notice."""
