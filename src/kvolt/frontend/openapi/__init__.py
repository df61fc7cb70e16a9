"""The OpenAPI document and the `/docs` page."""
