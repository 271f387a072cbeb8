"""Time and memory of a model beside its base."""
