// Changes of elements that are there. What is written anew is laid out and drawn anew, also if it says the same: so nothing
// is written that is there.

export function set(element, name, value) {
  if (element[name] !== value) element[name] = value;
}

export function put(element, text) {
  set(element, "textContent", text);
}

export function attribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Whether a button is pressed. */
export function press(button, is) {
  attribute(button, "aria-pressed", String(is));
}
