"""Models with tables as SavedModels that any TensorFlow loads."""

from sok.saved_model.export import ExportReport, TableReport, export_saved_model
from sok.saved_model.following import ExportFollower, follow_export

__all__ = ["ExportFollower", "ExportReport", "TableReport", "export_saved_model", "follow_export"]
