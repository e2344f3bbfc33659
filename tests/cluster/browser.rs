//! A real browser for the page: Debian's chromium, driven over WebDriver; and plain HTTP.
//!
//! *Invariant:* the browser ends with its [`Browser`].

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::sandbox::eventually;
use super::skip::skip;

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// The header lines, in small letters.
    pub(crate) head: String,
    pub(crate) body: String,
}

/// Sends a request with these header lines, and reads the whole answer.
pub(crate) fn http(
    mut stream: impl Read + Write,
    line: &str,
    headers: &[&str],
    body: &str,
) -> Answer {
    let length = format!("Content-Length: {}", body.len());
    let lines = [&[line][..], headers, &[&length, "Connection: close", "", body]].concat();
    stream.write_all(lines.join("\r\n").as_bytes()).expect("sent");
    let mut bytes = Vec::new();
    let mut reader = BufReader::new(stream);
    while !bytes.ends_with(b"\r\n\r\n") {
        assert!(reader.read_until(b'\n', &mut bytes).expect("an answer") > 0, "{bytes:?}");
    }
    let head = String::from_utf8(bytes).expect("text").to_lowercase();
    let mut body = Vec::new();
    let field =
        |name: &str| head.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
    match field("content-length:").and_then(|length| length.parse().ok()) {
        Some(length) => {
            body.resize(length, 0);
            reader.read_exact(&mut body).expect("the body");
        }
        None => drop(reader.read_to_end(&mut body)),
    }
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Answer { status, head, body: String::from_utf8_lossy(&body).into_owned() }
}

/// A browser with one page.
pub(crate) struct Browser {
    driver: Child,
    port: u16,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser; `None` if there is none, after saying so.
    pub(crate) fn start() -> Option<Self> {
        let driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let Ok(mut driver) = driver else {
            skip("chromium", "there is no chromedriver; scripts/setup.sh --tests");
            return None;
        };
        let lines = BufReader::new(driver.stdout.take().expect("piped")).lines();
        let port = lines.map_while(Result::ok).find_map(|line| {
            line.split_once("successfully on port ")?.1.trim_end_matches('.').parse().ok()
        });
        let port = port.expect("chromedriver says its port");
        let profile = tempfile::tempdir().expect("a directory");
        let mut browser = Self { driver, port, session: String::new(), _profile: profile };
        let folder = format!("--user-data-dir={}", browser._profile.path().display());
        let arguments = json!([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            folder
        ]);
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL" },
        }}});
        let session = browser.ask("POST", "/session", &wanted);
        browser.session = session["sessionId"].as_str().expect("a session").to_owned();
        Some(browser)
    }

    /// A request of WebDriver; below the session once there is one.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).expect("chromedriver");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
        let path = match self.session.as_str() {
            "" => path.to_owned(),
            session => format!("/session/{session}{path}"),
        };
        let host = format!("Host: localhost:{}", self.port);
        let headers = [host.as_str(), "Content-Type: application/json"];
        let answer =
            http(stream, &format!("{method} {path} HTTP/1.1"), &headers, &body.to_string());
        assert_eq!(answer.status, 200, "{method} {path}: {}", answer.body);
        serde_json::from_str::<Value>(&answer.body).expect("JSON")["value"].take()
    }

    /// Opens an address.
    pub(crate) fn open(&self, address: &str) {
        self.ask("POST", "/url", &json!({ "url": address }));
    }

    /// The value of a script, such as `return document.title`.
    pub(crate) fn script(&self, script: &str) -> Value {
        self.ask("POST", "/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Waits until an expression is true on the page.
    pub(crate) fn wait_for(&self, expression: &str) {
        eventually(expression, Duration::from_secs(180), || {
            self.script(&format!("return Boolean({expression})")) == true
        });
    }

    /// Clicks the first element that matches a selector of CSS, as a person would.
    pub(crate) fn click(&self, selector: &str) {
        let find = json!({ "using": "css selector", "value": selector });
        let element = self.ask("POST", "/element", &find);
        let id = element.as_object().and_then(|names| names.values().next()?.as_str());
        self.ask("POST", &format!("/element/{}/click", id.expect(selector)), &json!({}));
    }

    /// Presses keys where the focus is.
    pub(crate) fn press(&self, key: &str) {
        let actions = json!([{ "type": "key", "id": "keys", "actions": [
            { "type": "keyDown", "value": key }, { "type": "keyUp", "value": key },
        ]}]);
        self.ask("POST", "/actions", &json!({ "actions": actions }));
    }

    /// Makes the page this wide, light or dark, and without transitions, so that pictures show no moment
    /// between two colours.
    pub(crate) fn look_like(&self, width: u32, scheme: &str) {
        let size =
            json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.devtools("Emulation.setDeviceMetricsOverride", &size);
        let still = json!({ "name": "prefers-reduced-motion", "value": "reduce" });
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }, still]);
        self.devtools("Emulation.setEmulatedMedia", &json!({ "features": features }));
    }

    /// Lets pages of an origin do what a person would be asked about.
    pub(crate) fn permit(&self, what: &str, origin: &str) {
        self.devtools(
            "Browser.grantPermissions",
            &json!({ "permissions": [what], "origin": origin }),
        );
    }

    fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.ask("POST", "/goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    /// Has the page's work counted from now on, as [`Self::worked`] tells it.
    pub(crate) fn count_work(&self) {
        self.devtools("Performance.enable", &json!({ "timeDomain": "threadTicks" }));
    }

    /// Processor time that the page's thread has used, which does not depend on what else the machine
    /// does.
    pub(crate) fn worked(&self) -> Duration {
        let told = self.devtools("Performance.getMetrics", &json!({}));
        let metrics = told["metrics"].as_array().cloned().unwrap_or_default();
        let task = metrics.iter().find(|metric| metric["name"] == "TaskDuration");
        Duration::from_secs_f64(task.and_then(|task| task["value"].as_f64()).expect("counted"))
    }

    /// Nothing is wider than the window.
    pub(crate) fn assert_it_fits(&self, what: &str) {
        let wider = "return document.documentElement.scrollWidth - \
                     document.documentElement.clientWidth";
        assert_eq!(self.script(wider), 0, "{what}");
    }

    /// Writes a picture of the whole page into the directory named by `CUDA_CLUSTER_SCREENSHOTS`.
    pub(crate) fn picture(&self, name: &str) {
        let Some(folder) = std::env::var_os("CUDA_CLUSTER_SCREENSHOTS") else { return };
        let picture = self.devtools(
            "Page.captureScreenshot",
            &json!({ "captureBeyondViewport": true, "format": "png" }),
        );
        let bytes = base64(picture["data"].as_str().expect("a picture"));
        std::fs::write(Path::new(&folder).join(format!("{name}.png")), bytes).expect("written");
    }

    /// Errors on the console since the last call.
    pub(crate) fn errors(&self) -> Vec<String> {
        let entries = self.ask("POST", "/se/log", &json!({ "type": "browser" }));
        let entries = entries.as_array().cloned().unwrap_or_default();
        let severe = entries.into_iter().filter(|entry| entry["level"] == "SEVERE");
        severe.map(|entry| entry["message"].to_string()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() {
            // The browser is to end also after a failed test, and when it no longer answers.
            let end = std::panic::AssertUnwindSafe(|| self.ask("DELETE", "", &json!({})));
            let _ = std::panic::catch_unwind(end);
        }
        // SIGTERM lets chromedriver end the browser.
        let pid = nix::unistd::Pid::from_raw(self.driver.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.driver.wait();
    }
}

fn base64(text: &str) -> Vec<u8> {
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => u32::from(byte - b'A'),
        b'a'..=b'z' => u32::from(byte - b'a') + 26,
        b'0'..=b'9' => u32::from(byte - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    let groups = text.trim_end_matches('=').as_bytes().chunks(4);
    groups
        .flat_map(|group| {
            let bits = group.iter().fold(0, |bits, byte| bits << 6 | value(*byte));
            let bits = bits << (6 * (4 - group.len()) + 8);
            bits.to_be_bytes()[..group.len() - 1].to_vec()
        })
        .collect()
}
