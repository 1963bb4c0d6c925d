"""The configuration: schema (pydantic) and loading (YAML + dotted overrides)."""
