"""How the models that come with the project are trained."""
