"""Settings of a run: schema, loading, and the rules between fields."""
