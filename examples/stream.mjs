// Every change of some tables, as it happens: for a browser page and for Node.
//
//   HEADRACE_KEY=cdc_… node stream.mjs ws://127.0.0.1:3000/v1/stream orders customers
//
// Node 22 has a WebSocket of its own, Node 20 with --experimental-websocket; else `npm install ws`.
// A lost connection is made again after 1, 2, 4 and then every 8 seconds, and goes on where it was.

const WebSocket = globalThis.WebSocket ?? (await import("ws")).WebSocket;
const REMEMBERED = 10_000; // ids of events: one that comes again is passed over

/** Calls `onEvent` for each event, `onGap` when some were missed; returns a function that ends it. */
export function follow({ url, key, tables, onEvent, onGap = console.warn, onState = () => {} }) {
  const seen = new Set();
  let socket, timer, resume, failures = 0, ended = false;
  const say = (message) => socket.send(JSON.stringify(message));

  const hear = {
    auth_success() {
      say({ type: "protocol_version", requestedVersion: 1, supportedVersions: [1] });
      say({ type: "subscribe", tables, ...(resume && { resume }) });
    },
    auth_failure(message) {
      end(message.message); // another try would fare no better
    },
    subscription_confirmed({ subscriptionId, sequence, epoch }) {
      failures = 0;
      resume = { ...resume, subscriptionId, lastSequence: sequence, epoch };
      onState("connected");
    },
    subscription_rejected: (message) => end(message.message),
    cdc_event(event) {
      resume.lastEventId = event.eventId;
      if (seen.has(event.eventId)) return;
      seen.add(event.eventId);
      if (seen.size > REMEMBERED) seen.delete(seen.values().next().value);
      onEvent(event);
    },
    ping: ({ timestamp }) => say({ type: "pong", timestamp }),
    connection_status({ sequence }) {
      if (sequence !== undefined) resume.lastSequence = sequence;
    },
    error(message) {
      if (message.details?.gap) onGap(message); // query the current state to catch up
    },
  };

  function connect() {
    const mine = (socket = new WebSocket(url));
    mine.onopen = () => say({ type: "auth", apiKey: key });
    mine.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      hear[message.type]?.(message); // types and fields that are not known are passed over
    };
    mine.onclose = mine.onerror = () => {
      mine.onclose = mine.onerror = null; // Node 20 only says the second, browsers say both
      if (ended) return;
      const seconds = Math.min(2 ** failures++, 8);
      onState(`connects again in ${seconds} s`);
      timer = setTimeout(connect, seconds * 1000);
    };
  }

  function end(reason = "ended") {
    ended = true;
    clearTimeout(timer);
    socket.close();
    onState(reason);
  }

  connect();
  return end;
}

if (globalThis.process?.argv[1]?.endsWith("stream.mjs")) {
  const [url, ...tables] = process.argv.slice(2);
  follow({
    url,
    key: process.env.HEADRACE_KEY,
    tables,
    onEvent: (event) => console.log(JSON.stringify(event)),
    onGap: (gap) => console.error("missed events:", JSON.stringify(gap.details)),
    onState: (state) => console.error(state),
  });
}
