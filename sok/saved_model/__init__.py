"""Models with tables as SavedModels that any TensorFlow loads."""

from sok.saved_model.export import ExportReport, TableReport, export_saved_model

__all__ = ["ExportReport", "TableReport", "export_saved_model"]
