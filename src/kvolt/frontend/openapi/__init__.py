"""OpenAPI document and `/docs` page."""
