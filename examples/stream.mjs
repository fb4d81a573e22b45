// Every change of some tables, as it happens: for a browser page, and for Node:
//   HEADRACE_KEY=cdc_… node stream.mjs ws://127.0.0.1:3000/v1/stream orders customers
// A lost connection is made again after 1, 2, 4 and then every 8 seconds, and goes on where it was.

const WebSocket = globalThis.WebSocket ?? (await import("ws")).WebSocket; // npm install ws

/** Calls `onEvent` for each event, `onGap` when some were lost; returns a function that ends it. */
export function follow({ url, key, tables, onEvent, onGap = console.warn, onState = () => {} }) {
  const seen = new Set(); // ids of events: one that comes again is passed over
  let socket, resume, failures = 0, ended = false;
  const say = (message) => socket.send(JSON.stringify(message));
  const answers = {
    auth_success() {
      say({ type: "protocol_version", requestedVersion: 1, supportedVersions: [1] });
      say({ type: "subscribe", tables, resume }); // at first there is nothing to resume
    },
    auth_failure: ({ message }) => end(message), // another try would fare no better
    subscription_rejected: ({ message }) => end(message),
    subscription_confirmed({ subscriptionId, sequence, epoch }) {
      failures = 0;
      resume = { ...resume, subscriptionId, lastSequence: sequence, epoch };
      onState("connected");
    },
    cdc_event(event) {
      resume.lastEventId = event.eventId;
      if (!seen.has(event.eventId)) onEvent(event);
      seen.add(event.eventId);
      if (seen.size > 10_000) seen.delete(seen.values().next().value); // the oldest
    },
    connection_status: ({ sequence }) => sequence && (resume.lastSequence = sequence),
    ping: ({ timestamp }) => say({ type: "pong", timestamp }),
    // What is lost must be read anew; after any other error another connection may do better.
    error: (message) => (message.details?.gap ? onGap(message) : socket.close()),
  };
  function connect() {
    socket = new WebSocket(url);
    socket.onopen = () => say({ type: "auth", apiKey: key });
    socket.onmessage = ({ data }, message = JSON.parse(data)) => answers[message.type]?.(message);
    socket.onerror = () => {}; // it closes then
    socket.onclose = () => {
      if (ended) return;
      const seconds = Math.min(2 ** failures++, 8);
      onState(`connects again in ${seconds} s`);
      setTimeout(() => ended || connect(), seconds * 1000);
    };
  }
  function end(reason = "ended") {
    ended = true;
    socket.close();
    onState(reason);
  }
  connect();
  return end;
}

if (globalThis.process?.argv[1]?.endsWith("stream.mjs")) {
  const [url, ...tables] = process.argv.slice(2);
  const onEvent = (event) => console.log(JSON.stringify(event));
  follow({ url, key: process.env.HEADRACE_KEY, tables, onEvent, onState: console.error });
}
