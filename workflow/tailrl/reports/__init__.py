"""Pages, tables and figures, from artifacts, analysis and claims."""
