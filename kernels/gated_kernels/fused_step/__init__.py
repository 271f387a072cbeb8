"""One token through a whole linearized layer, from its projections to what the output projection takes."""
