// A tool server: a counter for each rollout, offered as osmosis.rollout.v1.ToolService.
//
//   node server.js [PORT] [HOST]
//
// TOOL_SERVER_TOKEN: the bearer token that callers must send; unset: none is needed.

import { timingSafeEqual } from "node:crypto";
import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

import { BoundedMap } from "./bounded_map.js";

const PROTOS = path.join(path.dirname(fileURLToPath(import.meta.url)), "../../protos");
const MOST_ROLLOUTS = 10_000;
const MOST_KEYS = 100_000;
const MOST_DROPPED = 100_000;

const dropped = new BoundedMap(MOST_DROPPED); // the uids of rollouts whose counter was dropped
const counters = new BoundedMap(MOST_ROLLOUTS, (uid) => dropped.set(uid, true)); // the state of each rollout, by its uid
const results = new BoundedMap(MOST_KEYS); // the promised response of each call, by its call key

class ToolError extends Error {}

const integer = { type: "integer", minimum: -1000, maximum: 1000 };
const TOOLS = {
  add: {
    description: "Add a number to the counter and return its new value.",
    schema: { type: "object", properties: { amount: integer }, required: ["amount"], additionalProperties: false },
    async run(counter, { amount }) {
      if (!Number.isInteger(amount) || Math.abs(amount) > 1000) {
        throw new ToolError("amount must be an integer from -1000 to 1000");
      }
      counter.value += amount;
      return String(counter.value);
    },
  },
  read: {
    description: "Return the value of the counter.",
    schema: { type: "object", properties: {}, additionalProperties: false },
    idempotent: true,
    async run(counter) {
      return String(counter.value);
    },
  },
};

function describeTools(call, respond) {
  if (!isAllowed(call)) return respond(UNAUTHENTICATED);
  const names = Object.keys(TOOLS);
  respond(null, {
    tools: names.map((name) => ({
      name,
      description: TOOLS[name].description,
      parametersJsonSchema: JSON.stringify(TOOLS[name].schema),
    })),
    idempotentTools: names.filter((name) => TOOLS[name].idempotent),
  });
}

async function callTool(call, respond) {
  if (!isAllowed(call)) return respond(UNAUTHENTICATED);
  const { uid, callKey } = call.request;
  if (!uid || !callKey) {
    return respond({ code: grpc.status.INVALID_ARGUMENT, details: "uid and call_key are needed" });
  }
  // The promise is kept, not its value: a key that is repeated while its call runs must not start a second one.
  let result = results.get(callKey);
  if (result === undefined) {
    result = run(uid, call.request.call);
    results.set(callKey, result);
  }
  respond(null, await result);
}

async function run(uid, call) {
  try {
    const tool = Object.hasOwn(TOOLS, call?.name) ? TOOLS[call.name] : undefined;
    if (tool === undefined) throw new ToolError(`there is no tool ${JSON.stringify(call?.name)}`);
    // A new counter in its place would begin at 0, and nobody would notice.
    if (dropped.get(uid)) throw new ToolError("the counter of this rollout was not used for too long, and was dropped");
    let counter = counters.get(uid);
    if (counter === undefined) counters.set(uid, (counter = { value: 0 }));
    const text = await tool.run(counter, JSON.parse(call.argumentsJson || "{}"));
    return { output: { parts: [{ text }] } };
  } catch (error) {
    // Anything but a ToolError is a defect of a tool, which may have changed the state before it failed.
    return { error: { message: error.message, mayHaveRun: !(error instanceof ToolError || error instanceof SyntaxError) } };
  }
}

const UNAUTHENTICATED = { code: grpc.status.UNAUTHENTICATED, details: "the bearer token is missing or wrong" };

function isAllowed(call) {
  const token = process.env.TOOL_SERVER_TOKEN;
  if (!token) return true;
  const sent = Buffer.from(String(call.metadata.get("authorization")[0] ?? ""));
  const expected = Buffer.from(`Bearer ${token}`);
  return sent.length === expected.length && timingSafeEqual(sent, expected);
}

const [port = "50061", host = "127.0.0.1"] = process.argv.slice(2);
const definition = protoLoader.loadSync("osmosis/rollout/v1/tool_service.proto", { includeDirs: [PROTOS], oneofs: true });
const { ToolService } = grpc.loadPackageDefinition(definition).osmosis.rollout.v1;
const server = new grpc.Server();
server.addService(ToolService.service, { describeTools, callTool });
server.bindAsync(`${host}:${port}`, grpc.ServerCredentials.createInsecure(), (error, bound) => {
  if (error) throw error;
  console.log(`tool server on grpc://${host}:${bound}`);
});
for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => server.tryShutdown(() => process.exit(0)));
