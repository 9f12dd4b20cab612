"""What every picture and page of weft is drawn with: charts (Bokeh), colours, number formats, and embedding in HTML.

Used by the report and by the pictures of the cluster simulator; imports only ``weft.records`` and ``weft.words``.
"""
