//! Laws and cases of the decisions.
