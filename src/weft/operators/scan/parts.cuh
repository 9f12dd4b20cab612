// Rows and columns in parts, where there are too few of them.
#pragma once

constexpr int WHOLE = 0, TOTALS = 1, CARRIED = 2;  // all at once; what each of its parts comes to; a part from what comes before it
