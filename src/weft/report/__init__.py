"""Renders records: the page of ``weft report`` (:mod:`weft.report.page`) and the measured tables of the documents
(:mod:`weft.report.documents`)."""
