//! The page's files, which are part of the program.
//!
//! *Invariant:* a file that is not in the list does not exist.

use std::borrow::Cow;

/// A file of the page.
pub(super) struct Asset {
    /// Its name in the URL.
    pub(super) name: &'static str,
    /// Its media type.
    pub(super) kind: &'static str,
    content: &'static str,
}

macro_rules! assets {
    ($($name:literal: $kind:literal),* $(,)?) => {
        &[$(Asset { name: $name, kind: $kind, content: include_str!(concat!("page/", $name)) }),*]
    };
}

const HTML: &str = "text/html; charset=utf-8";

/// All files; the first is the page.
const ASSETS: &[Asset] = assets! {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "address.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "details.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "flows.js": "text/javascript; charset=utf-8",
    "headline.js": "text/javascript; charset=utf-8",
    "legend.js": "text/javascript; charset=utf-8",
    "log_view.css": "text/css; charset=utf-8",
    "log_view.js": "text/javascript; charset=utf-8",
    "machine.js": "text/javascript; charset=utf-8",
    "matrix.js": "text/javascript; charset=utf-8",
    "model.js": "text/javascript; charset=utf-8",
    "notify.js": "text/javascript; charset=utf-8",
    "overview.css": "text/css; charset=utf-8",
    "overview.js": "text/javascript; charset=utf-8",
    "preflight.js": "text/javascript; charset=utf-8",
    "profile.js": "text/javascript; charset=utf-8",
    "strips.js": "text/javascript; charset=utf-8",
    "tasks.css": "text/css; charset=utf-8",
    "tasks.js": "text/javascript; charset=utf-8",
    "tiles.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "uplot.js": "text/javascript; charset=utf-8",
    "uplot.css": "text/css; charset=utf-8",
};

impl Asset {
    /// A file by its name; the page itself has none.
    pub(super) fn find(name: &str) -> Option<&'static Self> {
        let name = if name.is_empty() { ASSETS[0].name } else { name };
        ASSETS.iter().find(|asset| asset.name == name)
    }

    /// Its content; a debug build reads the source, so that a reload shows a change.
    pub(super) fn content(&self) -> Cow<'static, str> {
        if cfg!(debug_assertions) {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/dashboard/page");
            if let Ok(text) = std::fs::read_to_string(format!("{folder}/{}", self.name)) {
                return Cow::Owned(text);
            }
        }
        Cow::Borrowed(self.content)
    }
}

/// What a visitor gets who must still prove something, or who has just done so: a text, and where
/// to go then. It names no cluster. Its empty icon keeps a browser from asking for one.
pub(super) fn notice(text: &str, next: Option<&str>) -> (&'static str, String) {
    let text = crate::text::xml_escaped(text);
    let next = next.map_or(String::new(), |next| {
        // Not a redirect: the browser would treat it as coming from the page with the link, and
        // would not send the cookie.
        let next = crate::text::xml_escaped(next);
        format!("<meta http-equiv=\"refresh\" content=\"0; url={next}\">")
    });
    let page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">{next}\
         <link rel=\"icon\" href=\"data:,\"><title>cuda-cluster</title><p>{text}</p></html>\n"
    );
    (HTML, page)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page loads nothing from elsewhere and has no inline code or style, which its policy
    /// forbids.
    #[test]
    fn the_page_is_whole_small_and_without_inline_code() {
        let bytes: usize = ASSETS.iter().map(|asset| asset.content.len()).sum();
        assert!(bytes < 260 << 10, "{bytes} bytes");
        let page = ASSETS[0].content;
        let inline = |word: &str| word.starts_with("on") && word.contains('=');
        assert!(!page.contains("style=") && !page.split_whitespace().any(inline), "inline");
        for script in page.split("<script").skip(1) {
            assert!(script.trim_start_matches(|c| c != '>').starts_with("></script>"), "{script}");
        }
        for reference in page.split(['"', '\'']).filter(|text| text.ends_with(".js")) {
            assert!(Asset::find(reference).is_some(), "{reference}");
        }
    }

    #[test]
    fn jupyters_tile_has_the_pages_icon() {
        let icon = Asset::find("icon.svg").expect("an icon").content;
        assert_eq!(include_str!("../../python/cuda_cluster/icon.svg"), icon);
    }

    /// uPlot 1.6.32 as npm delivers it (`dist/uPlot.iife.min.js`, `dist/uPlot.min.css`).
    #[test]
    fn the_charts_library_is_the_published_one() {
        for (name, hash) in [
            ("uplot.js", "ea2d16ff65797375a846049c0f0a17f68b47a2850b9c73f2816ecf040ec9f2ce"),
            ("uplot.css", "70ead7542eab83ef6ff4269c1f139e3c40f5f59f98302552320b9f79188abba1"),
        ] {
            let content = Asset::find(name).expect(name).content;
            assert_eq!(blake3::hash(content.as_bytes()).to_hex().as_str(), hash, "{name}");
        }
    }
}
