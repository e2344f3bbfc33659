//! The stylesheet of the picture as a file, which is dark for who prefers that.
//!
//! *Invariant:* every colour that is drawn on a light ground has one for a dark ground, unless it
//! can be told from both.

/// Texts, and what is another colour on a dark ground: fills by their own value, because elements
/// have them as attributes, which a stylesheet overrides.
pub(super) const STYLE: &str = "\
text{font-family:'Inter','Segoe UI','Helvetica Neue',Arial,'DejaVu Sans',sans-serif;fill:#26324a}\
.small{font-size:10px;fill:#5b6780}.label{font-size:12px;fill:#5b6780}.strong{font-weight:600}\
.mono{font-family:'JetBrains Mono','DejaVu Sans Mono',monospace;font-size:9.5px;fill:#5b6780}\n\
@media(prefers-color-scheme:dark){text{fill:#e3e8f2}.small,.label,.mono{fill:#a3afc6}\n\
[fill='#f5f7fb']{fill:#10151f}[fill='#ffffff']{fill:#181f2c;stroke:#364055}\
[fill='#fafbfd']{fill:#1d2534;stroke:#323c50}[fill='#fdebc8']{fill:#46370f}\
[fill='#e2d5f7']{fill:#3a2b57}[fill='#d8e8fd']{fill:#183558}[fill='#f0f8e4']{fill:#22340c}\
[fill='#f0f1f4']{fill:#2a313e}[fill='#bfe08a']{fill:#48681a}[fill='#e9f2fe']{fill:#173152}\
[fill='#dff1c2']{fill:#2c430f}[fill='#fbe9f3']{fill:#471533}\n\
[stroke='#a6d468']{stroke:#5d8a2b}[stroke='#4b8f12']{stroke:#98cf5c}\
[stroke='#2f6504']{stroke:#c9ec9f}\n\
[style*='#6d4a0c']{fill:#f5d699!important}[style*='#1d4f91']{fill:#a9cdfb!important}\
[style*='#2f5a00'],[style*='#4c7a12']{fill:#c4e68f!important}\
[style*='#b8327f']{fill:#f4a3cf!important}}";
