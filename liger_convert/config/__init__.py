"""The recipe: its schema, its errors, the YAML behind it, and the recipes that come with the package."""
