// The JavaScript SDK of OpenAI: all calls at once, one line of JSON for each when it is over.
//     node openai_node.mjs '{"sdk": PATH, "url": …, "idle": ms, "patience": ms, "calls": [[{…body}, api], …]}'
import { pathToFileURL } from 'node:url';

const { sdk, url, idle, patience, calls } = JSON.parse(process.argv[2]);
const { default: OpenAI } = await import(pathToFileURL(sdk));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });

const create = {
  chat: (body, options) => client.chat.completions.create(body, options),
  completions: (body, options) => client.completions.create(body, options),
  responses: (body, options) => client.responses.create(body, options),
};

async function run([body, api], number) {
  const events = [];
  const failed = { error: '', kind: '' };
  try {
    const made = await create[api](body, { timeout: body.stream ? idle : patience });
    if (!body.stream) events.push(made);
    else for await (const event of made) events.push(event);
  } catch (error) {
    failed.error = error.message;
    failed.kind = error.constructor.name;
  }
  console.log(JSON.stringify({ number, events, ...failed }));
}

await Promise.all(calls.map(run));
